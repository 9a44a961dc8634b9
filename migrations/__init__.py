"""Alembic revisions; a released revision is never edited."""
