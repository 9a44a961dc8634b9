"""The measuring programs run; no test here looks at a clock."""
