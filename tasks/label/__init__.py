"""The relevance judge, and the policies that turn intended and judged grades into labels."""
