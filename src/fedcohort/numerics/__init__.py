"""Pure functions the selectors share. Nothing here knows what a client or a round is."""
