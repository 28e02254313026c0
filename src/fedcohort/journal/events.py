"""The events a journal holds beside its cohorts and replies; :mod:`fedcohort.journal.fields` says what is in each."""

ABANDONED = "abandoned"  # a cohort whose round was not counted
ATTRIBUTES = "attributes"  # clients' attributes, in an audited journal
CHANGED = "rules"  # rules that hold from a round on
CORRECTED = "corrections"  # replies that were changed before they entered an average
ENDED = "ended"  # a run came to its end, or broke off with an error
EXCLUDED = "excluded"  # whom the rules kept from a cohort
FACTS = "facts"  # something else became known about clients
FAILURES = "flower"  # why clients of a live round failed
FILTER = "filter"  # what a simulated run's filter noted
FORGOTTEN = "forgotten"  # a client was forgotten
JOINED = "join"  # clients came that were not known before
LATE_COUNTED = "late-counted"  # late models that are in the average of a later round
LEFT = "leave"  # clients are no longer members
PLANNED = "planned"  # how many rounds a run is to have
PROPOSED = "deadline"  # the deadline and the spares of a round, where they follow from earlier rounds
PRUNED = "pruned"  # old details were let go
RECOVERED = "recovered"  # a journal goes on without its newest commits
REFUSED = "order-refused"  # an operator's order could not be carried out
REGISTERED = "registered"  # clients known by their key
REJOINED = "rejoin"  # clients that left are members again
SELECTOR = "selector"  # another selector goes on in the place of the first
SETTINGS = "settings"  # what a live run was started with
SHADOW = "shadow"  # a shadow selector began to watch, or watches no longer
NEW_MODEL = "new-model"  # an asynchronous session has a new global model
TIMES = "times"  # how long the clients of a round took, where deadlines follow from it
TRIED = "try"  # a pending cohort is trained again
