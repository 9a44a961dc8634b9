"""The usage ledger, and which key asked for a turn.

Revision 0006, on top of 0005. It only adds: older code goes on beside it, and what it answers is not in the ledger.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("key_id", sa.Text(), nullable=False, server_default=""))
    op.create_table(
        "usage",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_ref", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id", "day", "session_id", "user_ref", "key_id", "model", "kind", name=op.f("pk_usage")
        ),
    )
    named = sa.text("session_id != ''")
    op.create_index(
        "ix_usage_session",
        "usage",
        ["tenant_id", "session_id"],
        sqlite_where=named,
        postgresql_where=named,
    )
    op.create_index("ix_usage_day", "usage", ["day"])
    op.create_table(
        "usage_flushes",
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("gateway", name=op.f("pk_usage_flushes")),
    )


def downgrade() -> None:
    op.drop_table("usage_flushes")
    op.drop_table("usage")
    op.drop_column("turns", "key_id")
