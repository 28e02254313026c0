"""What a journal proves: why a client was picked, that the rules held, that every cohort was the selector's choice."""
