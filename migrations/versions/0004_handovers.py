"""Turns that a gateway which stops offers to the others.

Revision 0004, on top of 0003. It only adds: older code goes on beside it, offers nothing and takes nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "handovers",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "turn_id", name=op.f("pk_handovers")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "turn_id"], ["turns.tenant_id", "turns.id"], name=op.f("fk_handovers_turns")
        ),
    )


def downgrade() -> None:
    op.drop_table("handovers")
