"""API keys, tenants and lines of the audit log as the admin API and the commands show them, alike. Pure."""

from __future__ import annotations

from typing import Any

from gateway.store.audit_records import OPERATOR, AuditRecord
from gateway.store.key_records import KeyRecord, TenantRecord


def key_json(key: KeyRecord, now: float) -> dict[str, Any]:
    return {
        "object": "key",
        "id": key.id,
        "tenant": key.tenant_id,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "state": key.state(now),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
        "replaces": key.replaces,
        "replaced_by": key.replaced_by,
    }


def tenant_json(tenant: TenantRecord) -> dict[str, Any]:
    return {
        "object": "tenant",
        "id": tenant.id,
        "name": tenant.name,
        "created_at": tenant.created_at,
        "working_keys": tenant.keys,
    }


def audit_json(record: AuditRecord) -> dict[str, Any]:
    line = record.line
    return {
        "object": "audit.line",
        "id": record.id,
        "at": record.at,
        "tenant": None if line.tenant_id == OPERATOR else line.tenant_id,
        "who": line.who,
        "action": line.action,
        "target": line.object,
        "request_id": line.request_id,
        "outcome": line.outcome,
        "details": dict(line.details),
    }
