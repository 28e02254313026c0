"""What happens to the cohort's models: local training, filters, aggregators, early stopping."""
