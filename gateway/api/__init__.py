"""HTTP in and out: routes, schemas, server-sent events, error translation."""
