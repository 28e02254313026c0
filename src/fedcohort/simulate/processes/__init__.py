"""Lock-step groups in other processes and on other machines."""
