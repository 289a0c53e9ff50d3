from tests.labs.verdicts import verdict_tests

test_wrong_is_told, test_right_is_accepted = verdict_tests("parameter_server")
