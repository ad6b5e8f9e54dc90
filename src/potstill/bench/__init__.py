"""Benchmarks behind the figures in README and docs: exactness, memory, speed. Nothing else imports them.

Each module has a `main(argv) -> int` that prints its Markdown tables, and exits 1 where a figure it promises is
missed.
"""
