"""For people, never imported by a server: what a start would do (check), who would serve (doctor), what a server gains
(diagnose). It predicts with the server's own plan and policies."""
