"""Attacks on every way of sharing labels, and what they find in a federation."""
