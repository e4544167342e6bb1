// Sphinx's scores, but for a message of an error, typed into the search: the pages that explain messages come first.
var Scorer = {
  score: ([page, , , , score]) => {
    const words = (new URLSearchParams(window.location.search).get("q") || "").trim().split(/\s+/);
    const explains = page === "errors" || page === "guides/troubleshooting";
    return explains && words.length >= 4 ? score + 100 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
