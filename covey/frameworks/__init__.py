"""The parts of Covey that work inside training frameworks, where a script asks for them."""
