"""The maths of distillation: torch only, no configuration, no I/O."""
