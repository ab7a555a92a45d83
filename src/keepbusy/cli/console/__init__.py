"""What was typed and what is shown, for all verbs alike: values, sources, the explanation, standard output."""
