"""Where a teacher's rows come from."""
