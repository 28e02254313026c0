"""Pure functions that several papers share. Nothing here knows what a client or a round is."""
