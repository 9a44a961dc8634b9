"""Compactions, pinned turns, and the version of a session's view.

Revision 0002, on top of 0001. It only adds: what was stored before stays as it is.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("view_version", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("turns", sa.Column("pinned", sa.Integer(), server_default="0", nullable=False))
    op.create_index(
        "ix_turns_pinned",
        "turns",
        ["tenant_id", "session_id"],
        unique=False,
        sqlite_where=sa.text("pinned = 1"),
        postgresql_where=sa.text("pinned = 1"),
    )
    op.create_index(
        "ix_turns_keyed",
        "turns",
        ["created_at"],
        unique=False,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_table(
        "compactions",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("base_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("head_turn_id", sa.Text(), nullable=False),
        sa.Column("anchor_turn_id", sa.Text(), nullable=True),
        sa.Column("anchor_seq", sa.BigInteger(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("view", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id", "session_id"], ["sessions.tenant_id", "sessions.id"], name=op.f("fk_compactions_sessions")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_compactions")),
        sa.UniqueConstraint(
            "tenant_id", "session_id", "number", name=op.f("uq_compactions_tenant_id_session_id_number")
        ),
    )
    op.create_index(
        "ix_compactions_running",
        "compactions",
        ["tenant_id", "session_id"],
        unique=True,
        sqlite_where=sa.text("status = 'running'"),
        postgresql_where=sa.text("status = 'running'"),
    )
    op.create_index(
        "ix_compactions_anchor",
        "compactions",
        ["tenant_id", "session_id", "anchor_seq", "number"],
        unique=False,
        sqlite_where=sa.text("status = 'committed'"),
        postgresql_where=sa.text("status = 'committed'"),
    )


def downgrade() -> None:
    op.drop_table("compactions")
    op.drop_index("ix_turns_keyed", "turns")
    op.drop_index("ix_turns_pinned", "turns")
    op.drop_column("turns", "pinned")
    op.drop_column("sessions", "view_version")
