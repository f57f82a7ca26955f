"""The run-time type checker of the tests: an int is accepted for a float, as usual in Python."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
