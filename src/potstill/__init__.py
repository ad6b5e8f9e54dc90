"""Distil a large language model into a small one."""
