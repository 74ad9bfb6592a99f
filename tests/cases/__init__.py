"""Op cases by family; every module with a list ``CASES`` is collected by test_op_cases.py."""
