"""Limits of tenants and keys, what is counted for them, and how much each session stores.

Revision 0008, on top of 0007. It only adds: older code goes on beside it, heeds no limit, and what it stores meanwhile
is counted when a session is next recounted.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_turns",
    "sessions",
    "stored_bytes",
    "month_tokens",
)
# what a session stores: its own texts, the items of its turns, their token ids
STORED = """
UPDATE sessions SET bytes =
    octet_length(tools) + octet_length(metadata) + coalesce(octet_length(system), 0)
    + coalesce((
        SELECT sum(octet_length(items.payload)) FROM items JOIN turns
            ON turns.tenant_id = items.tenant_id AND turns.id = items.turn_id
        WHERE turns.tenant_id = sessions.tenant_id AND turns.session_id = sessions.id
    ), 0)
    + coalesce((
        SELECT sum(coalesce(octet_length(prompt_ids), 0) + coalesce(octet_length(output_ids), 0)) FROM turns
        WHERE turns.tenant_id = sessions.tenant_id AND turns.session_id = sessions.id
    ), 0)
"""


def upgrade() -> None:
    op.add_column("sessions", sa.Column("key_id", sa.Text(), nullable=False, server_default=""))
    op.add_column("sessions", sa.Column("bytes", sa.BigInteger(), nullable=False, server_default="0"))
    in_bytes = STORED
    if op.get_bind().dialect.name == "sqlite":  # whose octet_length came in 3.43
        for column in ("tools", "metadata", "system", "items.payload", "prompt_ids", "output_ids"):
            in_bytes = in_bytes.replace(f"octet_length({column})", f"length(CAST({column} AS BLOB))")
    op.execute(in_bytes)
    op.create_table(
        "limits",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in LIMITS),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_id", name=op.f("pk_limits")),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("window", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "window", name=op.f("pk_counters")),
    )
    op.create_table(
        "slots",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_id", "id", name=op.f("pk_slots")),
    )
    op.create_index("ix_slots_id", "slots", ["id"])


def downgrade() -> None:
    op.drop_table("slots")
    op.drop_table("counters")
    op.drop_table("limits")
    op.drop_column("sessions", "bytes")
    op.drop_column("sessions", "key_id")
