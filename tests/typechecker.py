"""The run-time type checker of the tests: an int will do for a float, as everywhere in Python."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
