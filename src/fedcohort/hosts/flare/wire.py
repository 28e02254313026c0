"""The names of fedcohort's own tasks and of its cookie; everything else travels in a model's ``meta``."""

DESCRIBE = "fedcohort_describe"  # asks for facts about the data, and signals
LOSSES = "fedcohort_losses"  # asks for losses of a model on the site's data
TICKET = "fedcohort_ticket"  # a cookie, which FLARE returns with the result
