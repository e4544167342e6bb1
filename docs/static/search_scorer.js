// Sphinx's scores, but for a message of an error, typed into the search: the pages that explain messages come first.
var Scorer = {
  score: ([page, , anchor, , score]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").trim();
    const isMessage = query.split(/\s+/).length >= 4 || /^(NCC|NRT)_/i.test(query);
    const explains = page === "errors" || page === "guides/troubleshooting";
    return explains && (isMessage || anchor) ? score + 100 : score;
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

// Sphinx wants every word of a query on one page, but the values in a message are on none: they are left out, and of a
// message only the words of the page that has most of them are looked for.
if (typeof Search !== "undefined" && Search._parseQuery) {
  const parse = Search._parseQuery;
  Search._parseQuery = (query) => {
    const [text, terms, ...others] = parse(query);
    if (query.trim().split(/\s+/).length < 4) return [text, terms, ...others];
    const { docnames, terms: index } = Search._index;
    const [errors, guide] = ["errors", "guides/troubleshooting"].map((page) => {
      const has = (term) => Object.hasOwn(index, term) && [index[term]].flat().includes(docnames.indexOf(page));
      return new Set([...terms].filter(has));
    });
    const most = errors.size >= guide.size ? errors : guide;
    return [text, most.size ? most : terms, ...others];
  };
}
