from metasam.scripts.bench.run import main

main()
