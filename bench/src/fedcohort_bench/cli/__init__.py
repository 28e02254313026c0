"""The commands that this package adds to ``fedcohort``, one file each."""
