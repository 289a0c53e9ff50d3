from tests.labs.verdicts import tests_of

test_wrong_is_told, test_right_is_accepted = tests_of("accumulation")
