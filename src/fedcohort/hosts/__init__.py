"""Where rounds happen: the round itself, and the live federations that run it."""
