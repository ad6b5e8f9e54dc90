"""Where the student's samples come from."""
