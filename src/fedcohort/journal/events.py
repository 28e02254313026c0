"""The events a journal holds beside its cohorts and replies, by name."""

ABANDONED = "abandoned"  # a cohort whose round was not counted
CHANGED = "rules"  # rules that hold from a round on
CORRECTED = "corrections"  # replies that were changed before they entered an average
ENDED = "ended"  # a run came to its end, or broke off with an error
EXCLUDED = "excluded"  # whom the rules kept from a cohort
FAILURES = "flower"  # why clients of a live round failed
FORGOTTEN = "forgotten"  # a client was forgotten
PLANNED = "planned"  # how many rounds a run is to have
PRUNED = "pruned"  # old details were let go
RECOVERED = "recovered"  # a journal goes on without its newest commits
REFUSED = "order-refused"  # an operator's order could not be carried out
REGISTERED = "registered"  # clients known by their key
SELECTOR = "selector"  # another selector goes on in the place of the first
