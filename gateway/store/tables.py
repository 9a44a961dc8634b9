"""The tables. `tenant_id` leads every key, so that one tenant's rows are never within reach of another's query.

JSON is stored as text exactly as it was encoded; digests and token ids as bytes; instants as seconds since 1970.
A lease is part of its session's row: who holds it, until when, for which turn, under which fence.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("system", Text),
    Column("tools", Text, nullable=False),
    Column("title", Text),
    Column("user_ref", Text),
    Column("metadata", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("head_turn_id", Text),
    Column("next_seq", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("archived_at", Double),
    # the lease: held while running_turn_id is set, good until lease_until, proven by fence
    Column("fence", BigInteger, nullable=False),
    Column("lease_owner", Text),
    Column("lease_until", Double),
    Column("running_turn_id", Text),
    Column("cancel_requested", Integer, nullable=False),
    Column("view_version", BigInteger, nullable=False, server_default="0"),  # grows where what is sent changes
    Column("key_id", Text, nullable=False, server_default=""),  # of the API key that made it
    Column("bytes", BigInteger, nullable=False, server_default="0"),  # of its items, token ids and own texts
    PrimaryKeyConstraint("tenant_id", "id"),
)
Index("ix_sessions_listed", sessions.c.tenant_id, sessions.c.updated_at, sessions.c.id)
_running = sessions.c.running_turn_id.is_not(None)
Index("ix_sessions_running", sessions.c.lease_until, sqlite_where=_running, postgresql_where=_running)
_of_user = sessions.c.user_ref.is_not(None)
Index(
    "ix_sessions_user",
    sessions.c.tenant_id,
    sessions.c.user_ref,
    sqlite_where=_of_user,
    postgresql_where=_of_user,
)
_expiring = sessions.c.expires_at.is_not(None)
Index("ix_sessions_expiring", sessions.c.expires_at, sqlite_where=_expiring, postgresql_where=_expiring)

session_metadata = Table(  # the pairs of sessions.metadata again, one a row, to find sessions by them
    "session_metadata",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("tenant_id", "session_id", "key"),
    ForeignKeyConstraint(["tenant_id", "session_id"], ["sessions.tenant_id", "sessions.id"]),
)
Index("ix_session_metadata_pair", session_metadata.c.tenant_id, session_metadata.c.key, session_metadata.c.value)

turns = Table(
    "turns",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("parent_id", Text),
    Column("seq", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),  # grows when the turn is reopened
    Column("idempotency_key", Text),
    Column("request_hash", LargeBinary),
    Column("on_disconnect", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("completed_at", Double),
    Column("finish_reason", Text),
    Column("user_ref", Text, nullable=False),  # the session's, '' for none: history matching looks it up here
    Column("meaning", LargeBinary),
    Column("fingerprint", Text),  # of prompt_ids and output_ids; NULL: the turn has none
    Column("base_tokens", BigInteger),
    Column("path_tokens", BigInteger),
    Column("path_digest", LargeBinary),
    Column("open_answer", Integer, nullable=False),
    Column("usage", Text, nullable=False),
    Column("placement", Text, nullable=False),
    Column("prefix_report", Text, nullable=False),
    Column("error", Text),
    Column("metadata", Text, nullable=False),
    # last, because SQLite reads a row from its start: a head costs the same however long its ids are
    Column("prompt_ids", LargeBinary),
    Column("output_ids", LargeBinary),
    Column("pinned", Integer, nullable=False, server_default="0"),  # 0 or 1, which SQLite keeps in the row's header
    Column("key_id", Text, nullable=False, server_default=""),  # of the API key that asked
    PrimaryKeyConstraint("tenant_id", "id"),
    UniqueConstraint("tenant_id", "session_id", "seq"),
    ForeignKeyConstraint(["tenant_id", "session_id"], ["sessions.tenant_id", "sessions.id"]),
)
_keyed = turns.c.idempotency_key.is_not(None)
Index(
    "ix_turns_idempotency_key",
    turns.c.tenant_id,
    turns.c.session_id,
    turns.c.idempotency_key,
    unique=True,
    sqlite_where=_keyed,
    postgresql_where=_keyed,
)
_meant = turns.c.meaning.is_not(None)
Index(
    "ix_turns_meaning",
    turns.c.tenant_id,
    turns.c.user_ref,
    turns.c.meaning,
    turns.c.created_at,
    sqlite_where=_meant,
    postgresql_where=_meant,
)
Index("ix_turns_created_at", turns.c.created_at)
Index("ix_turns_keyed", turns.c.created_at, sqlite_where=_keyed, postgresql_where=_keyed)
PINNED = turns.c.pinned == literal_column("1")  # spelt out, as is the index: SQLite matches the two by their text
Index("ix_turns_pinned", turns.c.tenant_id, turns.c.session_id, sqlite_where=PINNED, postgresql_where=PINNED)

items = Table(
    "items",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("turn_id", Text, nullable=False),
    Column("part", Integer, nullable=False),  # 0: the turn's input, 1: its output
    Column("idx", Integer, nullable=False),
    Column("type", Text, nullable=False),
    Column("payload", Text, nullable=False),
    PrimaryKeyConstraint("tenant_id", "turn_id", "part", "idx"),
    ForeignKeyConstraint(["tenant_id", "turn_id"], ["turns.tenant_id", "turns.id"]),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("turn_id", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant_id", "turn_id", "seq"),
    ForeignKeyConstraint(["tenant_id", "turn_id"], ["turns.tenant_id", "turns.id"]),
    sqlite_with_rowid=False,
)
Index("ix_events_created_at", events.c.created_at)

compactions = Table(  # one row an attempt; a committed one says what is sent of the paths that run through its anchor
    "compactions",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("number", BigInteger, nullable=False),  # from 1 in each session, in the order in which they began
    Column("base_id", Text),  # the committed one whose view it builds on
    Column("status", Text, nullable=False),
    Column("trigger", Text, nullable=False),
    Column("head_turn_id", Text, nullable=False),
    Column("anchor_turn_id", Text),  # the latest turn that the view touches; set with the view
    Column("anchor_seq", BigInteger),
    Column("owner", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("deadline_at", Double, nullable=False),
    Column("completed_at", Double),
    Column("error", Text),
    Column("report", Text, nullable=False),
    Column("plan", Text, nullable=False),
    Column("view", Text),
    PrimaryKeyConstraint("tenant_id", "id"),
    UniqueConstraint("tenant_id", "session_id", "number"),
    ForeignKeyConstraint(["tenant_id", "session_id"], ["sessions.tenant_id", "sessions.id"]),
)
RUNNING = compactions.c.status == literal_column("'running'")
Index(
    "ix_compactions_running",
    compactions.c.tenant_id,
    compactions.c.session_id,
    unique=True,  # one at a time in a session
    sqlite_where=RUNNING,
    postgresql_where=RUNNING,
)
COMMITTED = compactions.c.status == literal_column("'committed'")
Index(
    "ix_compactions_anchor",
    compactions.c.tenant_id,
    compactions.c.session_id,
    compactions.c.anchor_seq,
    compactions.c.number,
    sqlite_where=COMMITTED,
    postgresql_where=COMMITTED,
)

handovers = Table(  # running turns that a gateway which stops offers to the others
    "handovers",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("turn_id", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("state", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant_id", "turn_id"),
    ForeignKeyConstraint(["tenant_id", "turn_id"], ["turns.tenant_id", "turns.id"]),
)

erasures = Table(  # receipts: what was erased and how much of it, never a word of what it said
    "erasures",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("erased", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("scope", Text, nullable=False, server_default="session"),  # session, expired, user
    Column("subject", Text),  # of a user's: a keyed digest of the name
    Column("user_ref", Text),  # the name itself, while rows of that user may be left
    Column("sessions", BigInteger, nullable=False, server_default="1"),
    Column("status", Text, nullable=False, server_default="done"),  # erasing (rows), pending (places), done
    Column("places", Text, nullable=False, server_default="{}"),  # what those said that are done
    Column("completed_at", Double),
    PrimaryKeyConstraint("tenant_id", "id"),
)
Index("ix_erasures_listed", erasures.c.tenant_id, erasures.c.at, erasures.c.id)
OPEN = erasures.c.status != literal_column("'done'")
Index("ix_erasures_open", erasures.c.tenant_id, erasures.c.subject, sqlite_where=OPEN, postgresql_where=OPEN)

places = Table(  # where something of a session may be beside the rows: replicas, gateways' memory, the database's files
    "places",
    metadata,
    Column("name", Text, primary_key=True),
    Column("gateway", Text),  # who alone reaches it; NULL: every gateway does
    Column("kind", Text, nullable=False),  # replica, engine, memory, database
    Column("seen_at", Double, nullable=False),
)

forgettings = Table(  # a session that a place has still to forget
    "forgettings",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("erasure_id", Text, nullable=False),  # the receipt that waits for it; '' and 'archive': none does
    Column("session_id", Text, nullable=False),
    Column("place", Text, nullable=False),
    Column("due_at", Double, nullable=False),  # whoever takes it up moves this on, so that no other does
    Column("tries", Integer, nullable=False),
    Column("error", Text),
    PrimaryKeyConstraint("tenant_id", "erasure_id", "session_id", "place"),
)
Index("ix_forgettings_due", forgettings.c.place, forgettings.c.due_at)

api_keys = Table(
    "api_keys",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("scopes", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),
    Column("replaces", Text),  # the key that this one was made for, by rotation
    Column("replaced_by", Text),  # the key that was made for this one
    PrimaryKeyConstraint("tenant_id", "id"),
)

audit = Table(  # who did what to which object; ids and numbers, never a word of what anybody said
    "audit",
    metadata,
    Column("tenant_id", Text, nullable=False),  # whose the object is; empty: nobody's
    Column("id", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("request_id", Text),
    Column("outcome", Text, nullable=False),
    Column("details", Text, nullable=False),
    PrimaryKeyConstraint("tenant_id", "id"),
)
Index("ix_audit_at", audit.c.at, audit.c.id)
Index("ix_audit_tenant", audit.c.tenant_id, audit.c.at, audit.c.id)

probe = Table(  # one row that readiness writes to, so that "can write" is tried and not guessed
    "probe",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
)

replicas = (
    Table(  # the operator's, of no tenant: replicas added at runtime, and those of the settings that were drained
        "replicas",
        metadata,
        Column("name", Text, primary_key=True),
        Column("source", Text, nullable=False),
        Column("url", Text),  # NULL: the settings say
        Column("credential", LargeBinary),  # sealed under a key that derives from the gateways' secret
        Column("terms", Text, nullable=False),
        Column("state", Text, nullable=False),
        Column("revision", BigInteger, nullable=False),  # grows with every change of state
        Column("reason", Text, nullable=False),
        Column("created_at", Double, nullable=False),
        Column("changed_at", Double, nullable=False),
        Column("drain_until", Double),
        # the gateway that moves its sessions away, good until worker_until
        Column("worker", Text),
        Column("worker_until", Double),
        Column("progress", Text, nullable=False),
    )
)

replica_reports = Table(  # while a replica is drained: what each gateway still runs there
    "replica_reports",
    metadata,
    Column("replica", Text, nullable=False),
    Column("gateway", Text, nullable=False),
    Column("running", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    PrimaryKeyConstraint("replica", "gateway"),
)

usage = Table(  # the ledger: a row for each day, key, end user, session, model and kind of work; counts outlive names
    "usage",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("day", Integer, nullable=False),  # days since 1970, UTC
    Column("session_id", Text, nullable=False),  # '' for none, and for one that was erased
    Column("user_ref", Text, nullable=False),
    Column("key_id", Text, nullable=False),  # '' for the gateway's own work
    Column("model", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("count", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "day", "session_id", "user_ref", "key_id", "model", "kind"),
)
_of_session = usage.c.session_id != literal_column("''")
Index(
    "ix_usage_session",
    usage.c.tenant_id,
    usage.c.session_id,
    sqlite_where=_of_session,
    postgresql_where=_of_session,
)
Index("ix_usage_day", usage.c.day)

usage_flushes = Table(  # the last number that each gateway wrote of what belongs to no transaction of a turn
    "usage_flushes",
    metadata,
    Column("gateway", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
)

limits = Table(  # of a tenant (key_id '') and of its keys; NULL: no limit
    "limits",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("concurrent_turns", BigInteger),
    Column("sessions", BigInteger),
    Column("stored_bytes", BigInteger),
    Column("month_tokens", BigInteger),
    Column("revision", BigInteger, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("kv_bytes", BigInteger),
    PrimaryKeyConstraint("tenant_id", "key_id"),
)

counters = Table(  # what is counted a minute, where gateways count in the database
    "counters",
    metadata,
    Column("name", Text, nullable=False),  # a limit and whose it is
    Column("window", BigInteger, nullable=False),  # the minute, since 1970
    Column("count", BigInteger, nullable=False),
    PrimaryKeyConstraint("name", "window"),
)

slots = Table(  # turns that run and count towards a limit, where gateways count in the database
    "slots",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("until", Double, nullable=False),
    PrimaryKeyConstraint("tenant_id", "key_id", "id"),
)
Index("ix_slots_id", slots.c.id)
