"""Grid to cells to stored rows: planning, execution, resume, environment."""
