"""How FLARE carries what travels beside the model: tasks of our own, and one entry of a model's ``meta``."""

DESCRIBE = "fedcohort_describe"  # who are you, what do you hold, what can you report?
LOSSES = "fedcohort_losses"  # losses of this model on your data
TICKET = "fedcohort_ticket"  # a cookie, which comes back with the result
