"""The steps flows are made of: plain functions of typed rows, no Prefect in sight."""
