"""Sessions, turns, items, ids, events, keys, receipts.

Revision 0001, the first
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_table(
        "erasures",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("erased", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_erasures")),
    )
    op.create_table(
        "probe",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probe")),
    )
    op.create_table(
        "sessions",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("system", sa.Text(), nullable=True),
        sa.Column("tools", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=True),
        sa.Column("user_ref", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("head_turn_id", sa.Text(), nullable=True),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("archived_at", sa.Double(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("running_turn_id", sa.Text(), nullable=True),
        sa.Column("cancel_requested", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_sessions")),
    )
    op.create_index(
        "ix_sessions_expiring",
        "sessions",
        ["expires_at"],
        unique=False,
        sqlite_where=sa.text("expires_at IS NOT NULL"),
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_index("ix_sessions_listed", "sessions", ["tenant_id", "updated_at", "id"], unique=False)
    op.create_index(
        "ix_sessions_running",
        "sessions",
        ["lease_until"],
        unique=False,
        sqlite_where=sa.text("running_turn_id IS NOT NULL"),
        postgresql_where=sa.text("running_turn_id IS NOT NULL"),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "session_metadata",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "session_id"],
            ["sessions.tenant_id", "sessions.id"],
            name=op.f("fk_session_metadata_sessions"),
        ),
        sa.PrimaryKeyConstraint("tenant_id", "session_id", "key", name=op.f("pk_session_metadata")),
    )
    op.create_index("ix_session_metadata_pair", "session_metadata", ["tenant_id", "key", "value"], unique=False)
    op.create_table(
        "turns",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_hash", sa.LargeBinary(), nullable=True),
        sa.Column("on_disconnect", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("user_ref", sa.Text(), nullable=False),
        sa.Column("meaning", sa.LargeBinary(), nullable=True),
        sa.Column("fingerprint", sa.Text(), nullable=True),
        sa.Column("base_tokens", sa.BigInteger(), nullable=True),
        sa.Column("path_tokens", sa.BigInteger(), nullable=True),
        sa.Column("path_digest", sa.LargeBinary(), nullable=True),
        sa.Column("open_answer", sa.Integer(), nullable=False),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.Column("placement", sa.Text(), nullable=False),
        sa.Column("prefix_report", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("output_ids", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id", "session_id"], ["sessions.tenant_id", "sessions.id"], name=op.f("fk_turns_sessions")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_turns")),
        sa.UniqueConstraint("tenant_id", "session_id", "seq", name=op.f("uq_turns_tenant_id_session_id_seq")),
    )
    op.create_index(
        "ix_turns_idempotency_key",
        "turns",
        ["tenant_id", "session_id", "idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index("ix_turns_created_at", "turns", ["created_at"], unique=False)
    op.create_index(
        "ix_turns_meaning",
        "turns",
        ["tenant_id", "user_ref", "meaning", "created_at"],
        unique=False,
        sqlite_where=sa.text("meaning IS NOT NULL"),
        postgresql_where=sa.text("meaning IS NOT NULL"),
    )
    op.create_table(
        "events",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "turn_id"], ["turns.tenant_id", "turns.id"], name=op.f("fk_events_turns")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "turn_id", "seq", name=op.f("pk_events")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_events_created_at", "events", ["created_at"], unique=False)
    op.create_table(
        "items",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("idx", sa.Integer(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id", "turn_id"], ["turns.tenant_id", "turns.id"], name=op.f("fk_items_turns")),
        sa.PrimaryKeyConstraint("tenant_id", "turn_id", "part", "idx", name=op.f("pk_items")),
        sqlite_with_rowid=False,
    )
    tenants = sa.table("tenants", sa.column("id"), sa.column("name"), sa.column("created_at"))
    op.bulk_insert(tenants, [{"id": "default", "name": "default", "created_at": time.time()}])
    op.bulk_insert(sa.table("probe", sa.column("id"), sa.column("at")), [{"id": 1, "at": 0.0}])


def downgrade() -> None:
    op.drop_table("items")
    op.drop_table("events")
    op.drop_table("turns")
    op.drop_table("session_metadata")
    op.drop_table("tenants")
    op.drop_table("sessions")
    op.drop_table("probe")
    op.drop_table("erasures")
    op.drop_table("api_keys")
