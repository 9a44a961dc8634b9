"""How many bytes of K/V replicas may keep for a tenant's, or a key's, sessions.

Revision 0009, on top of 0008. It only adds: older code goes on beside it and heeds the other limits.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("limits", sa.Column("kv_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("limits", "kv_bytes")
