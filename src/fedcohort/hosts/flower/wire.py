"""The types of fedcohort's messages on Flower. Questions and answers travel in one ConfigRecord.

Flower's strategies demand exactly one ArrayRecord and one MetricRecord in a reply and average every metric in it, but
they ignore ConfigRecords.
"""

DESCRIBE = "query.fedcohort_describe"  # asks for name, facts about the data, and signals
LOSSES = "query.fedcohort_losses"  # asks for losses of a model on the client's data
