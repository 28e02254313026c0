"""Pure functions that several selectors share."""
