"""The audit log, and API keys that replace each other.

Revision 0005, on top of 0004. It only adds: older code goes on beside it, writes no lines and rotates no key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text()),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_at", "audit", ["at", "id"])
    op.create_index("ix_audit_tenant", "audit", ["tenant_id", "at", "id"])
    op.add_column("api_keys", sa.Column("replaces", sa.Text()))
    op.add_column("api_keys", sa.Column("replaced_by", sa.Text()))


def downgrade() -> None:
    op.drop_column("api_keys", "replaced_by")
    op.drop_column("api_keys", "replaces")
    op.drop_index("ix_audit_tenant", "audit")
    op.drop_index("ix_audit_at", "audit")
    op.drop_table("audit")
