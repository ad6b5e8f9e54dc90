"""The losses inside other frameworks: one file for each, tested against the real package, imported only by name."""
