"""What a journal proves: that it is intact, that the rules held, and that every cohort was the selector's choice."""
