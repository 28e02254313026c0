"""The kinds of events in a journal; :mod:`fedcohort.journal.fields` says what each of them holds."""

ABANDONED = "abandoned"  # a cohort's round was given up and does not count
ATTRIBUTES = "attributes"  # clients' attributes, in an audited journal
CHANGED = "rules"  # rules that apply from a round on
CORRECTED = "corrections"  # replies that were changed before they entered an average
ENDED = "ended"  # a run finished, or failed with an error
EXCLUDED = "excluded"  # clients that the rules kept out of a cohort
FACTS = "facts"  # facts about clients changed
FAILURES = "flower"  # why clients of a live round failed
FILTER = "filter"  # notes of a simulated run's filter
FORGOTTEN = "forgotten"  # a client was forgotten
JOINED = "join"  # new clients joined
LATE_COUNTED = "late-counted"  # late models entered the average of a later round
LEFT = "leave"  # clients are no longer members
PLANNED = "planned"  # the number of rounds that a run will have
PROPOSED = "deadline"  # the deadline and the spares of a round, if they follow from earlier rounds
PRUNED = "pruned"  # old details were deleted
RECOVERED = "recovered"  # a journal was continued without its newest commits
REFUSED = "order-refused"  # an operator's order could not be carried out
REGISTERED = "registered"  # clients that identify themselves with a key
REJOINED = "rejoin"  # clients that had left are members again
SELECTOR = "selector"  # another selector replaced the first
SETTINGS = "settings"  # the settings of a live run
SHADOW = "shadow"  # a shadow selector was added or dropped
NEW_MODEL = "new-model"  # an asynchronous session has a new global model
TIMES = "times"  # how long the clients of a round took, if deadlines follow from it
TRIED = "try"  # a pending cohort is trained again
