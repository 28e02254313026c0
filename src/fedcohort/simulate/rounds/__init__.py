"""Rounds in lock-step: from a configuration to the rounds of all its runs."""
