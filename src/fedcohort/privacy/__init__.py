"""Class balance without anybody's labels leaving them: encryption, rotation, noise, estimates, attacks, audits."""
