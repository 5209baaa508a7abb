"""What is wrong in a ds_config.json: rules, the places they find, and the fixes."""
