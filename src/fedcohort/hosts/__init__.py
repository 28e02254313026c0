"""Rounds, and the live federations that run them."""
