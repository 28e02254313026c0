"""A twin of a federation, made from its journal, and advice from many twins.

:func:`~fedcohort.advice.record.read_record` reads what a journal knows, :class:`~fedcohort.advice.fit.Fit` fits
distributions to it, :mod:`~fedcohort.advice.twin` makes configurations of twins from them, and
:mod:`~fedcohort.advice.trial` plays several ways to run the federation on many twins.
"""
