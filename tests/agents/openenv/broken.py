"""A server that does not start."""

raise SystemExit("the licence has expired")
