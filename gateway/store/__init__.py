"""The database: tables, queries scoped by tenant, and the one writer."""
