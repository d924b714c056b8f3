"""`stillhouse view RUN`: shows the rollouts of a recorded run token by token, in one HTML file.

rollouts.py     the record -> rollouts, each put together from all batches that it was in
heads.py        what teachers that sent hidden states would have written
worst_tokens.py the tokens at which student and teacher differ most, and what the teacher would have written
vocabulary.py   token ids -> text
page.py         rollouts -> the file; page.html, page.css and *.js are its fixed parts
command.py      the command line
"""
