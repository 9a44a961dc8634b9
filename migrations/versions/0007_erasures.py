"""Erasures that go on until every place that held something of a session has let it go.

Revision 0007, on top of 0006. It only adds: receipts of older code are done when they are written, and older code asks
the replicas itself.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("scope", sa.Text(), nullable=False, server_default="session"),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("user_ref", sa.Text(), nullable=True),
        sa.Column("sessions", sa.BigInteger(), nullable=False, server_default="1"),
        sa.Column("status", sa.Text(), nullable=False, server_default="done"),
        sa.Column("places", sa.Text(), nullable=False, server_default="{}"),
        sa.Column("completed_at", sa.Double(), nullable=True),
    ):
        op.add_column("erasures", column)
    op.create_index("ix_erasures_listed", "erasures", ["tenant_id", "at", "id"])
    is_open = sa.text("status != 'done'")
    columns = ["tenant_id", "subject"]
    op.create_index("ix_erasures_open", "erasures", columns, sqlite_where=is_open, postgresql_where=is_open)
    of_user = sa.text("user_ref IS NOT NULL")
    op.create_index(
        "ix_sessions_user", "sessions", ["tenant_id", "user_ref"], sqlite_where=of_user, postgresql_where=of_user
    )
    op.create_table(
        "places",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("gateway", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_places")),
    )
    op.create_table(
        "forgettings",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("erasure_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "erasure_id", "session_id", "place", name=op.f("pk_forgettings")),
    )
    op.create_index("ix_forgettings_due", "forgettings", ["place", "due_at"])


def downgrade() -> None:
    op.drop_table("forgettings")
    op.drop_table("places")
    op.drop_index("ix_sessions_user", "sessions")
    op.drop_index("ix_erasures_open", "erasures")
    op.drop_index("ix_erasures_listed", "erasures")
    for name in ("completed_at", "places", "status", "sessions", "user_ref", "subject", "scope"):
        op.drop_column("erasures", name)
